"""Recipes and components before anything is built: YAML, overrides, validation, the registry of plugins, schemas.

No torch here, so that ``blt list`` and ``blt validate`` answer at once. May import ``errors`` only. A change here can
break which recipes load, what a message points at, and the plugin contract (``hooks.py``).
"""
