"""Other detection methods, in the same contract."""
