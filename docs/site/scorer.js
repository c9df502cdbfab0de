// Sphinx's scores, and pages to look up or of measurements below those that tell how something is done.
const LAST = /^(faq|glossary|environment|changelog|old-commands|contributing|measured\/|reference\/commands)/;
var Scorer = {
  score: ([page, , , , score]) => score - (LAST.test(page) ? 10 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
// A page that is opened from a disk may not read the others for their summaries.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
