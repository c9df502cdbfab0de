"""Fine-tuning of Hugging Face's models: all weights (``full``), or adapters with frozen weights (``lora``, PEFT).

``backend`` does not need torch. The other modules run only inside the ranks.
"""
