"""Fleets: in this process, as processes on one or several machines, or behind a remote master.

Refuses to know what is asked, and how answers are shown."""
