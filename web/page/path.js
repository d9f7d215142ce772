// SPDX-License-Identifier: Apache-2.0
//
// Which lessons each room goes with. The lessons say it (docs/learn, "On the page"), and web/lessons.py reads it there.
export const pages = JSON.parse(document.getElementById('lessons').textContent);

/** The rooms of a lesson, as in the URL: "tiles?window=255,0". */
export const roomsOf = (lesson) => pages[lesson].rooms;

/** The numbers of the lessons of a room. */
export const lessonsOf = (id) => Object.keys(pages).filter((lesson) => roomsOf(lesson).some((room) => room.split('?')[0] === id)).map(Number);
