"""The torchtitan backend (0.2.2): its job file and command line, and what runs inside its processes.

``render`` is pure and needs no torch. ``entry``, ``cpu`` and ``observe`` run inside the ranks only.
"""
