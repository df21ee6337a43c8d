"""Measuring: workloads, the runs over them, and reports.

Knows: everything below the commands. Refuses to know: the command line.
"""
