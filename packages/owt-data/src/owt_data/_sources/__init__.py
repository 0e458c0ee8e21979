"""Sources of documents: their names, their files, and datasets of the Hugging Face hub."""
