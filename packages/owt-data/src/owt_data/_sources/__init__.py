"""Where documents come from: names, files, the Hugging Face hub."""
