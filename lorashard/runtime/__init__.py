"""What a rank shares with the others and with its launcher: collectives, devices, signals, heartbeat, output.

No model and no data. `dist` and `shared_groups` alone name torch's collectives; most other files import no torch.
"""
