"""GGUF files, llama.cpp's form of checkpoints: header, metadata and tokenizer. Standard library only."""
