"""Layers of the decoder: matrix products, rotary embedding, and fused chains of both."""
