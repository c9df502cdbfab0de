"""Fine-tuning of Hugging Face's models: of all weights, or by adapters (PEFT)."""
