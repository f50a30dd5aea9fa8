"""Fleets that answer: in this process, as processes on one or several machines, or a master elsewhere.

Refuses to know what is asked, and how answers are shown."""
