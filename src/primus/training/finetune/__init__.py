"""Fine-tuning of Hugging Face's models: all weights (``full``), or adapters with frozen weights (``lora``, PEFT).

``config`` and ``hub`` do not need torch. The other modules run only inside the ranks.
"""
