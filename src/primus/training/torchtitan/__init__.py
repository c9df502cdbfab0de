"""The torchtitan backend (0.2.2).

``render`` does not need torch. ``entry``, ``cpu`` and ``observe`` run only inside the ranks.
"""
