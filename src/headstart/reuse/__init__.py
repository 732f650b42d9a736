"""Why a prefix was reused, or was not: prompts compared by tokens, by hashes and by their texts. One list of causes."""
