"""Picture files: read safely in any ordinary format, and written back as they were. Without torch.

May import what ``restoration`` may. A change here can break what becomes of colours, bits and metadata.
"""
