"""Reconstructing images: the variational problem, its samples, trained models at work, metrics, pictures and tiles.

``variational`` is the problem; ``image_lower``, ``image_upper``, ``image_composite`` and ``image_saddle`` are what
``bilevel`` sees of it. ``data_loading`` reads images, simulates their measurements and puts batches of both on the
device: threads, caches and prefetching belong there. ``metrics`` has every metric of restored images, ``model`` the
format of θ files. May import ``bilevel``, ``config``, ``runs`` and ``distributed``. A change here can break what a θ
file means, restored pictures, and every figure that is reported about them.
"""
