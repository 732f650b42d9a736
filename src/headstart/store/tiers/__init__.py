"""Tiers of the store beside the local disk: sealed blocks in Redis (extra [redis]), and several stores as one."""
