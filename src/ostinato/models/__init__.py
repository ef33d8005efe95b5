"""Which models come inside the package? One folder each, in Hugging Face format."""
