"""The prefix-trie KV cache."""
