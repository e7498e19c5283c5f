"""The components that come with bltoolbox, one folder per role.

A component is a class in a file of its folder and a record in the ``blt_components`` of that folder's
``__init__.py``. Imports ``bltoolbox.plugin`` (and ``bltoolbox.testing``) only, like a plugin of anyone else. A change
here can break recipes, θ files and the state in checkpoints of that component.
"""
