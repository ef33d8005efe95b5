"""From conversations, texts and images to token ids.

Files in reading order:

* ``template_report``: what the chat template loses of earlier turns
* ``next_prompt``: what is known of the prompt that follows an answer
* ``image_worker``, ``image_decoder``: decode images within limits
* ``image_prompts``: the images of a prompt, and their places among its tokens
* ``text_tokenizer``: tokenizes only the part of a text that is not known
* ``chat``: renders conversations with the turns of the ledger, and notes answers there
* ``prompt_tokenizer``: turns the texts and images of prompts into token ids
* ``public_prefixes``: which prefixes are public, and which prompt begins with one
* ``image_encoder``: runs the encoder of images beside the steps
"""
