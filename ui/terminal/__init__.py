"""Runs in a terminal, for those on ssh: `lorashard runs` and `lorashard watch`, with the fields and words of the pages.

Reads run folders only, and needs neither Gradio nor torch.
"""
