"""`specsot bench quick`, `specsot bench full` and `specsot verify`: entry points of the command `specsot`."""
