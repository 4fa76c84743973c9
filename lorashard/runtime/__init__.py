"""What a rank shares with the others and with its launcher: collectives, devices, signals, heartbeat, output.

No model and no data. `dist` alone names torch's collectives; most other files import no torch.
"""
