"""Reconstructing images: the variational problem, its samples, trained models at work, metrics, pictures and tiles.

May import ``bilevel``, ``config``, ``runs`` and ``distributed``. A change here can break what a θ file means, restored
pictures, and every figure that is reported about them.
"""
