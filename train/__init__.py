"""QLoRA fine-tuning from environment variables: `python -m train VERB`."""
