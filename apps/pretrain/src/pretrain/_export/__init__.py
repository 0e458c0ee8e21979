"""Trained models in Hugging Face's format."""
