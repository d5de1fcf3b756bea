"""Detection methods: one file and one decorator each."""
