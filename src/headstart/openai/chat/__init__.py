"""Chat templates, rendered in processes of their own."""
