"""What each placement costs in memory and time on given devices, and which one to take.

Counts and measures on meta tensors and small probes; nothing here loads or places a base.
"""
