"""The mathematics: roles and records, the lower-level loop, linear systems, the oracle, error bounds, warm starts.

Knows tasks, not images; no recipe and no component by name. ``problem`` is the interface that everything else sees:
``Lower`` and ``Upper``; ``composite`` and ``saddle`` are two forms of a lower level that some solvers need. ``oracle``
answers the optimizer, ``hypergradient`` computes z of one chunk for it. What is certified or estimated about the
accuracy of values and hypergradients is in ``bounds``, what a call costs in ``records`` and ``tally``. A new method is
a component in ``plugins/blt_builtins``, not a file here. May import ``distributed``. A change here can break
correctness of every method, exact resume, and speed: its tests compare with closed forms and finite differences.
"""
