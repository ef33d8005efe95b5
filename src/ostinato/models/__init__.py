"""The models that come inside the package: one folder each, in Hugging Face format."""
