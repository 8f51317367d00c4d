"""Claims and EHR histories: sources to a cleaned cache, to labels, to sequences of PheCodes on an irregular clock."""
