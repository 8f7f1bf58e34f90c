// Requests with bodies of many sizes over kept connections, and large answers, in one event loop.
'use strict';
const http = require('http');
const crypto = require('crypto');

const large = crypto.randomBytes(3000000);
const digest = (bytes) => crypto.createHash('md5').update(bytes).digest('hex');

const server = http.createServer((request, response) => {
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', () => response.end(request.url === '/large' ? large : digest(Buffer.concat(parts))));
});

function ask(agent, options, body) {
    return new Promise((resolve, reject) => {
        const request = http.request({agent, host: '127.0.0.1', port: server.address().port, ...options}, (answer) => {
            const parts = [];
            answer.on('data', (part) => parts.push(part));
            answer.on('end', () => resolve(Buffer.concat(parts)));
            answer.on('error', reject);
        });
        request.on('error', reject);
        request.end(body);
    });
}

async function post(agent, size) {
    const body = crypto.randomBytes(size);
    const answer = await ask(agent, {method: 'POST', path: '/'}, body);
    if (answer.toString() !== digest(body)) throw new Error(`a body of ${size} bytes arrived changed`);
}

async function get(agent) {
    if (!(await ask(agent, {path: '/large'})).equals(large)) throw new Error('the large answer arrived changed');
}

server.listen(0, '127.0.0.1', async () => {
    const agent = new http.Agent({keepAlive: true, maxSockets: 20});
    const rounds = async (first, last) => {
        for (let round = first; round < last; round++) {
            const posts = [...Array(40).keys()].map((i) => post(agent, 1 + ((i + round * 40) * 7919) % 200000));
            await Promise.all([...posts, get(agent), get(agent)]);
        }
    };
    await rounds(0, 5);
    console.log(`port ${server.address().port}`);
    // The connections are looked at from outside meanwhile.
    process.stdin.once('data', async () => {
        await rounds(5, 20);
        agent.destroy();
        server.close();
        console.log('all well');
        process.exit(0);
    });
});
