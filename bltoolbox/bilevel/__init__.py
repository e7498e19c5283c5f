"""The mathematics: roles and records, the lower-level loop, linear systems, the oracle, error bounds, warm starts.

Knows tasks, not images; no recipe and no component by name. May import ``distributed``. A change here can break
correctness of every method, exact resume, and speed: its tests compare with closed forms and finite differences.
"""
