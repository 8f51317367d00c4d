"""The command line: thin verbs over `bitimely_core`."""
