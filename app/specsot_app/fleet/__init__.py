"""Fleets: in this process, as processes on one or several machines, or behind a remote master.

They do not know what is asked, or how answers are shown.
"""
