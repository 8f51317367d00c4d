"""One reader a file format: hardened, fuzzed, and raising nothing but `UserError`. No torch here."""
