"""What every service process needs around its work: flags, logs, signals, memory habits.

Refuses to know which service it is.
"""
