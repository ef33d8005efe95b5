"""LoRA adapters: files, weights, and their products.

Files in reading order:

* ``lora``: assigns LoRA updates to the rows of a step
* ``lora_updates``: adds LoRA updates to the outputs of linear layers
* ``lora_config``: reads and checks an adapter's config
* ``lora_targets``: finds what an adapter changes in a model
* ``lora_files``: loads an adapter of ``peft``
* ``module_updates``: adds LoRA updates to modules that are called
"""
