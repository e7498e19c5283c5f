"""Learning θ: from a recipe to an experiment, the upper loop, checkpoints, resuming, the tuned baseline, sweeps.

``checkpoint`` has the format of checkpoints, ``keeper`` decides when one is written, ``misfits`` refuses one that
does not fit; ``recorder`` writes the logs of a run. Where batches of images come from is
``restoration.data_loading``. May import every room but ``reports`` and ``testing``. A change here can break exact
resume, old checkpoints and what a run writes to disk.
"""
