"""Errors, wire values and process parts that several processes of Stagemesh share."""
