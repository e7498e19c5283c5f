"""Learning θ: from a recipe to an experiment, the upper loop, checkpoints, resuming, the tuned baseline, sweeps.

May import every room but ``reports`` and ``testing``. A change here can break exact resume and what a run writes to
disk.
"""
