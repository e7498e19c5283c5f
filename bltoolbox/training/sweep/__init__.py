"""Grids of runs: the cells of a grid, their directory, and their processes.

May import what ``training`` may. A change here can break existing sweeps.
"""
