"""What a machine has and lacks for HyperHetero, found without opening a chip."""
