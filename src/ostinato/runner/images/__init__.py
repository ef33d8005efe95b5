"""Runs the encoder of images, and keeps its outputs.

Files in reading order:

* ``vision_families``, ``vision``: turn an image into rows of the model's input
* ``store``: the images of live requests, and cached encoder outputs
* ``step``: computes a step with images
"""
