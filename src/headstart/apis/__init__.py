"""The generation APIs as server and router know them: paths, errors, the end of a stream, prompts as chats."""
