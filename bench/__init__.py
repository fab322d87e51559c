"""Measures Casemate beside the sandboxes it competes with; ``python -m bench.launch`` is the first bench.

Every bench prints the same form (``bench.report``): one run, interleaved over all peers, medians, minima
and ratios with their targets, and the facts about the machine that the numbers depend on.
"""
