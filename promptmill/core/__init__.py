"""The kernel: nouns, ports, errors, settings, clock, ids, metric names and logs.

Every package may import it; it imports none of ours.
"""
