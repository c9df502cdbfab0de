"""Fine-tuning with Hugging Face's models: all weights (``full``), or adapters beside frozen ones (``lora``, PEFT).

``config`` is pure and needs no torch. The rest runs inside the ranks only.
"""
