"""Several runs side by side: groups of seeds, curves on a common axis, sheets of restored images.

May import what ``reports`` may. A change here can break the figures of ``blt compare``.
"""
