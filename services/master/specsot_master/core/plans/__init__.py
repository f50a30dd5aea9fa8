"""Plans: whether a request is planned, how its points become branches, and how their text is merged."""
