"""The Megatron backend (megatron-core 0.16.1): its arguments, and what runs inside its processes.

``config`` and ``render`` are pure and need no torch. The rest runs inside the ranks only.
"""
